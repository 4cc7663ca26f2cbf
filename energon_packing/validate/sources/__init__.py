"""What `validate` is given: our YAML, a Bridge recipe, a stored Bridge configuration, or Megatron-LM's arguments."""

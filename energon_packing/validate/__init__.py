"""``energon-packing validate``: can this run work, and what will it do? Answered before any GPU is taken.

* `sources`: what is judged: our YAML, a Bridge recipe or a stored Bridge configuration, Megatron-LM's arguments.
* `views`: each of them as one `run_view.RunView`, which is all that a rule reads.
* `rules`: the rules, by topic; `rules.registry.judge` applies them. Needs neither torch nor Bridge.
* `verdict`: what the installed Bridge itself says of the run.
* `looks`: data set, processor, chat template and ten conversations, as far as they lie on this machine.
"""

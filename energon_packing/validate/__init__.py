"""``energon-packing validate``: can this run work, and what will it do? It answers before any GPU is taken.

* `run_source`: what is judged: our YAML, a Bridge recipe or a stored Bridge configuration, Megatron-LM's arguments.
  All give a `run_view.RunView`, which is all that a rule reads; `recipes` makes that of Bridge.
* `rules`: the rules, by topic; `rules.rule.judge` applies them. Needs neither torch nor Bridge.
* `verdict`: the verdict of the installed Bridge itself.
* `looks`: data set, processor, chat template and 200 conversations, if they are on this machine.
"""

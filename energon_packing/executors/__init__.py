"""Who does the tasks of an offline command: this process, processes of this machine, or workers of a Ray cluster.

A command describes its `work.Work` once and lists its tasks; `choice.ExecutorConfig` finds the executor that the user
asked for.
"""

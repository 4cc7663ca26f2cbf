"""Who does the tasks of a command: this process, processes of this machine, or workers of a Ray cluster.

A command describes its `work.Work` once and lists its tasks; `work.ExecutorConfig` finds the executor that the user
asked for. An executor is a module of this folder that declares an `EXECUTOR`.
"""

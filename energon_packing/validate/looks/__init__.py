"""Looks at what a run reads: data set, processor, chat template, 200 conversations. Nothing is downloaded."""

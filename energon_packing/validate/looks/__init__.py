"""Looks at what a run reads: data set, processor, chat template, ten conversations. Nothing is downloaded."""

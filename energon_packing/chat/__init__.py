"""Chat templates: from a conversation to text and the spans of it that are trained."""

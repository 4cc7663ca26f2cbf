"""Vision families: geometry, placeholders, pixels and positions of one kind of model, one file each."""

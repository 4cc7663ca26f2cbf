"""Reports: previews of packs, packs beside their samples alone on a model, and the fill of a list of lengths."""

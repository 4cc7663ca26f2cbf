"""Images, videos and tensor files: their sizes, and decoding them."""

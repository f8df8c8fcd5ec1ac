"""Hand-written codecs of the APIs that carry most traffic, and the schemas of Mansio's own APIs."""

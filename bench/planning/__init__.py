"""A model of what decoding costs, and what it says about ways of decoding."""

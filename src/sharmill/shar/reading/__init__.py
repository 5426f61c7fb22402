"""The reader: datasets and Shars of other tools as lhotse's cuts, in an order that can be resumed anywhere."""

"""The demo: a tiny model, trained six ways and compared on one page."""

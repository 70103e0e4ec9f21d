"""The demonstration: a tiny model made on the spot, trained three ways, compared on one page."""

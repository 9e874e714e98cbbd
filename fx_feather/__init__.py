"""fx_feather: a model written once, for one device, and a layout table that splits it over many."""

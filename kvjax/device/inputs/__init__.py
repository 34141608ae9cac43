"""A step's inputs on the device: a plan padded to a declared shape, of one data rank or of several."""

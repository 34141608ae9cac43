"""What all pictures share: colours that mean the same in each, legends beside the data, files that stay equal."""

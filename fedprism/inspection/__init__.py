"""What datasets and federations look like: lists, tables, plots and pictures."""

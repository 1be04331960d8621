"""Results of `benchmarks.paper`: what a run measured, its tables, and a page that shows them."""

"""Find ranks that failed or hang, and end the job with a report that names them."""

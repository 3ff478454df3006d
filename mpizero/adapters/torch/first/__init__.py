"""Look at the first passes of a module and of a loss, and refuse what would depend on ranks or on grains."""

"""Recording: the calls of this process while it runs, and what other ranks ask about them."""

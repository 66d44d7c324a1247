"""Key-value store through which ranks find each other if a launcher other than `dadt run` started them."""

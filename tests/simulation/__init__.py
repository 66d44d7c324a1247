"""Jobs in a simulated world: the decisions of a launcher run as they are, and all around them is made up by a seed."""

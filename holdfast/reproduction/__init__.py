"""Playing a paper's table again: what it consists of (study), which experiments that makes (cells), what is
read off them (values), what the paper claims (claims), and all of it together (outcome)."""

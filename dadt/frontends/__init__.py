"""APIs in the style of other libraries, a folder for each, built on the operations of dadt.api."""

"""Everything a report says, computed once, and its renderings."""

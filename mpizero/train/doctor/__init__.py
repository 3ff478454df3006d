"""``mpizero doctor``: examine what training needs on this machine."""

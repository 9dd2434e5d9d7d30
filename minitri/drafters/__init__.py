"""A stage that guesses without a model: lookup of the last words in texts and a datastore."""

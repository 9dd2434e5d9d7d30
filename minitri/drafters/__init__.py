"""A stage that guesses without a model, by lookup in texts and a datastore; its turns with one."""

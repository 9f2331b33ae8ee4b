"""Who leads: one lease for a namespace (`protocol`, `redis`), and one beat's part in it (`elector`)."""

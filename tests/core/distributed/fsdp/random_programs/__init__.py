"""Random models and training programs: ``draw`` creates them, ``execute`` runs them sharded and unsharded, ``launch`` starts the ranks."""

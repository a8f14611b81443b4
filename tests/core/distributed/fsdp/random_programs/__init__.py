"""Random models, and random programs that train them sharded and unsharded: ``draw`` makes, ``execute`` runs, ``launch`` gives ranks."""

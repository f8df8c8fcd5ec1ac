"""Result tables: Iceberg tables that pipelines write with the rows of the user's function."""

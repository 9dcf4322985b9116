"""Study files shipped with Cohort: one YAML file each, opening with the question that it answers."""

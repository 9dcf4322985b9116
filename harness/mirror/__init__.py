"""What follows the record and shows it elsewhere: MLflow, and mirrors that are plugins."""

"""What follows the record and shows it elsewhere: MLflow, mirrors that are plugins, notices."""

"""What every plugin must keep, shipped: `cohort check PACKAGE` asks it of a package of your own."""

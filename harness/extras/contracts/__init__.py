"""The rules that every plugin must keep: `cohort check PACKAGE` checks a package of your own."""

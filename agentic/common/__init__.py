"""Parts shared by at least two methods. Nothing in here knows a method; import the submodules directly."""

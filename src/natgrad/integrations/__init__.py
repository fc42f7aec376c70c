"""K-FAC inside of other libraries' training loops; each file needs its library, none the others."""

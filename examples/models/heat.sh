#!/bin/sh
# Make the Python module heat of heat.f90, by f2py: sh heat.sh [PYTHON]
# The same as `python -m numpy.f2py -c -m heat heat.f90`, which needs meson and ninja besides the compilers.
set -e
python=${1:-python}
"$python" -m numpy.f2py -m heat heat.f90 --quiet # writes heatmodule.c
f2py=$("$python" -c 'import numpy.f2py; print(numpy.f2py.get_include())')
numpy=$("$python" -c 'import numpy; print(numpy.get_include())')
headers=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
gcc -O2 -fPIC -I"$f2py" -I"$numpy" -I"$headers" -c heatmodule.c "$f2py/fortranobject.c"
gfortran -O2 -fPIC -shared heat.f90 heatmodule.o fortranobject.o \
    -o "heat$("$python" -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')"
rm heatmodule.c heatmodule.o fortranobject.o

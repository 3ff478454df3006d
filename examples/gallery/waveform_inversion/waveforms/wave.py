"""Propagate acoustic waves through a grid of velocities, and the exact adjoint of that, in Numba.

A field is an array of pressures whose outer ``HALO`` rows and columns are always zero. With the field f[n] at time step
n, the factors v = (dt c / h)^2 of velocities c, the Laplacian L (of fourth order, times h^2) and a taper T,

    f[n + 1] = T (2 f[n] - T f[n - 1] + v L f[n]) + source[n],    f[0] = f[-1] = 0

T is 1 but near the edges, where it damps the waves (Cerjan et al. 1985, "A nonreflecting boundary condition for
discrete acoustic and elastic wave equations"). L is symmetric, because fields are zero outside.

Let l[n] be the derivative of a function of the fields by f[n], through later fields too, and a[n] the one without
them. Then

    l[n] = a[n] + 2 w[n] + L (v w[n]) - T w[n + 1],    w[n] = T l[n + 1]

and the derivative by v is the sum of w[n] L f[n] over all n (Plessix 2006, "A review of the adjoint-state method for
computing the gradient of a functional with geophysical applications"). Each time step is differentiated as it is
computed, so this is the gradient of the computed function, up to rounding.
"""

from __future__ import annotations

import numpy as np
from numba import njit

#: Rows and columns of zeros around a field.
HALO = 2
#: Waves grow without limit where v is larger: 4 divided by the largest eigenvalue of -L, which is 32 / 3.
STABLE = 0.375


@njit(cache=True, nogil=True, error_model="numpy")
def propagate(factors, taper, source, wavelet, fields):
    """Compute the fields of all time steps but the first.

    Parameters
    ----------
    factors, taper : array (rows, columns)
        v and T, with a halo that is not read.
    source : array (2,) of int
        Row and column of the source.
    wavelet : array (steps,)
        What the source adds in each time step.
    fields : array (steps + 1, rows, columns)
        Zero in ``fields[0]`` and in the halos; all else is overwritten.
    """
    two = fields.dtype.type(2)
    for n in range(wavelet.size):
        before, now, after = fields[max(n - 1, 0)], fields[n], fields[n + 1]
        for i in range(HALO, fields.shape[1] - HALO):
            v, t, f, earlier, out = inner(factors, i), inner(taper, i), inner(now, i), inner(before, i), inner(after, i)
            stencil = around(now, i)
            for j in range(out.size):
                out[j] = t[j] * (two * f[j] - t[j] * earlier[j] + v[j] * laplacian(stencil, j))
        after[source[0], source[1]] += wavelet[n]


@njit(cache=True, nogil=True, error_model="numpy")
def propagate_adjoint(factors, taper, source, receivers, by_records, fields, by_factors, by_wavelet):
    """Compute the derivatives by the factors and by the wavelet, given those by what receivers record.

    Parameters
    ----------
    factors, taper, source, fields : array
        As :func:`propagate` had and left them.
    receivers : array (number of receivers, 2) of int
        Rows and columns of the receivers.
    by_records : array (steps, number of receivers)
        Derivatives by ``fields[1:]`` at the receivers.
    by_factors : array (rows, columns)
        To be overwritten.
    by_wavelet : array (steps,)
        To be overwritten.
    """
    two = fields.dtype.type(2)
    by_field, weighted, now, later = [np.zeros_like(factors) for _ in range(4)]  # l[n + 1], v w[n], w[n], w[n + 1]
    by_factors[:] = 0
    for n in range(by_wavelet.size - 1, -1, -1):
        for k in range(receivers.shape[0]):
            by_field[receivers[k, 0], receivers[k, 1]] += by_records[n, k]
        by_wavelet[n] = by_field[source[0], source[1]]
        for i in range(HALO, factors.shape[0] - HALO):
            v, t, by, w = inner(factors, i), inner(taper, i), inner(by_field, i), inner(now, i)
            product, sums, stencil = inner(weighted, i), inner(by_factors, i), around(fields[n], i)
            for j in range(w.size):
                w[j] = t[j] * by[j]
                product[j] = v[j] * w[j]
                sums[j] += w[j] * laplacian(stencil, j)
        for i in range(HALO, factors.shape[0] - HALO):
            t, by, w, w_later = inner(taper, i), inner(by_field, i), inner(now, i), inner(later, i)
            stencil = around(weighted, i)
            for j in range(w.size):
                by[j] = two * w[j] + laplacian(stencil, j) - t[j] * w_later[j]
        now, later = later, now


@njit(inline="always")
def inner(field, i):
    """Return row ``i`` without its halo."""
    return field[i, HALO : field.shape[1] - HALO]


@njit(inline="always")
def around(field, i):
    """Return what the Laplacian in row ``i`` is made of, as slices that all begin at 0.

    With shifted indices Numba would allow for negative ones, and vector instructions of the processor stay idle.
    """
    row, stop = field[i], field.shape[1]
    near = (row[1 : stop - 3], row[3 : stop - 1], inner(field, i - 1), inner(field, i + 1))
    far = (row[: stop - 4], row[4:], inner(field, i - 2), inner(field, i + 2))
    return inner(field, i), near, far


@njit(inline="always")
def laplacian(stencil, j):
    """Return the Laplacian at place ``j`` of a row, whose slices :func:`around` has made."""
    here, (left, right, up, down), (left2, right2, up2, down2) = stencil
    kind = here.dtype.type
    near = left[j] + right[j] + up[j] + down[j]
    far = left2[j] + right2[j] + up2[j] + down2[j]
    return kind(4 / 3) * near - kind(1 / 12) * far - kind(5) * here[j]

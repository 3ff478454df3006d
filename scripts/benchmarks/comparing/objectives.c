/* The objectives that minimizers are compared on: one compiled function for all of them, whoever calls it.
 *
 * NAME(n, x, rows, data, slope) returns the value at the n numbers x, and writes its gradient. NAME_product(n, x, v,
 * rows, data, result) writes the product of the Hessian at x with v. The data are the doubles that objectives.py makes.
 */
#include <math.h>
#include <string.h>

/* The sum of 100 (x[i+1] - x[i]^2)^2 + (1 - x[i])^2. */
double rosenbrock(long n, const double *x, long rows, const double *data, double *slope) {
    double value = 0;
    memset(slope, 0, n * sizeof(double));
    for (long i = 0; i + 1 < n; i++) {
        double a = x[i + 1] - x[i] * x[i], b = 1 - x[i];
        value += 100 * a * a + b * b;
        slope[i + 1] += 200 * a;
        slope[i] -= 400 * x[i] * a + 2 * b;
    }
    return value;
}

void rosenbrock_product(long n, const double *x, const double *v, long rows, const double *data, double *result) {
    memset(result, 0, n * sizeof(double));
    for (long i = 0; i + 1 < n; i++) {
        double a = x[i + 1] - x[i] * x[i], change = v[i + 1] - 2 * x[i] * v[i];
        result[i + 1] += 200 * change;
        result[i] += 2 * v[i] - 400 * (v[i] * a + x[i] * change);
    }
}

/* The same of neighbouring pairs, each alone; summed in blocks, because there are millions of them. */
double pairs(long n, const double *x, long rows, const double *data, double *slope) {
    double value = 0;
    for (long first = 0; first < n; first += 2048) {
        double block = 0;
        for (long i = first; i < n && i < first + 2048; i += 2) {
            double a = x[i + 1] - x[i] * x[i], b = 1 - x[i];
            block += 100 * a * a + b * b;
            slope[i + 1] = 200 * a;
            slope[i] = -400 * x[i] * a - 2 * b;
        }
        value += block;
    }
    return value;
}

/* Wells at 1 and -1, tilted, and springs between neighbours: near 0 the curvature is negative in many directions. */
double wells(long n, const double *x, long rows, const double *data, double *slope) {
    double value = 0;
    memset(slope, 0, n * sizeof(double));
    for (long i = 0; i < n; i++) {
        double a = x[i] * x[i] - 1, stretch = i + 1 < n ? x[i + 1] - x[i] : 0;
        value += a * a / 4 - 0.1 * x[i] + stretch * stretch / 2;
        slope[i] += x[i] * a - 0.1 - stretch;
        if (i + 1 < n) slope[i + 1] += stretch;
    }
    return value;
}

void wells_product(long n, const double *x, const double *v, long rows, const double *data, double *result) {
    memset(result, 0, n * sizeof(double));
    for (long i = 0; i < n; i++) {
        double stretch = i + 1 < n ? v[i + 1] - v[i] : 0;
        result[i] += (3 * x[i] * x[i] - 1) * v[i] - stretch;
        if (i + 1 < n) result[i + 1] += stretch;
    }
}

/* The regularized logistic loss; a row of the data is a sample's features times its sign. */
static double dot(long n, const double *a, const double *b) {
    double sum = 0;
    for (long i = 0; i < n; i++) sum += a[i] * b[i];
    return sum;
}

double logistic(long n, const double *x, long rows, const double *data, double *slope) {
    double value = 0.05 * dot(n, x, x);
    for (long i = 0; i < n; i++) slope[i] = 0.1 * x[i];
    for (const double *row = data; row < data + rows * n; row += n) {
        double margin = dot(n, row, x), wrong = 1 / (1 + exp(margin));
        value += margin > 0 ? log1p(exp(-margin)) : log1p(exp(margin)) - margin;
        for (long i = 0; i < n; i++) slope[i] -= wrong * row[i];
    }
    return value;
}

void logistic_product(long n, const double *x, const double *v, long rows, const double *data, double *result) {
    for (long i = 0; i < n; i++) result[i] = 0.1 * v[i];
    for (const double *row = data; row < data + rows * n; row += n) {
        double wrong = 1 / (1 + exp(dot(n, row, x))), weight = wrong * (1 - wrong) * dot(n, row, v);
        for (long i = 0; i < n; i++) result[i] += weight * row[i];
    }
}

/* The conductivity exp(x) on the n edges of a line of n - 1 cells: half the squared misfit of the fields of some
 * sources, and 0.00005 |x|^2. The data are the sources, then the measured fields. */
static double difference(long n, const double *u, long i) {
    return (i < n - 1 ? u[i] : 0) - (i > 0 ? u[i - 1] : 0);
}

/* Solve for the field, in place; the matrix has k[i] + k[i + 1] on its diagonal and -k[i] beside it. */
static void solve(long n, const double *k, double *u) {
    double pivot[n], factor[n];
    for (long i = 0; i < n - 1; i++) {
        factor[i] = i ? -k[i] / pivot[i - 1] : 0;
        pivot[i] = k[i] + k[i + 1] + factor[i] * k[i];
        if (i) u[i] -= factor[i] * u[i - 1];
    }
    for (long i = n - 2; i >= 0; i--) u[i] = u[i] / pivot[i] - (i + 2 < n ? factor[i + 1] * u[i + 1] : 0);
}

/* Set u to minus the transposed difference of weight * difference(of). */
static void transpose(long n, const double *weight, const double *of, double *u) {
    for (long i = 0; i < n - 1; i++)
        u[i] = weight[i + 1] * difference(n, of, i + 1) - weight[i] * difference(n, of, i);
}

double conductivity(long n, const double *x, long rows, const double *data, double *slope) {
    double value = 0.5e-4 * dot(n, x, x), k[n], u[n], adjoint[n];
    for (long i = 0; i < n; i++) k[i] = exp(x[i]), slope[i] = 1e-4 * x[i];
    for (const double *source = data; source < data + rows * (n - 1); source += n - 1) {
        const double *measured = source + rows * (n - 1);
        memcpy(u, source, (n - 1) * sizeof(double));
        solve(n, k, u);
        for (long i = 0; i < n - 1; i++) adjoint[i] = u[i] - measured[i];
        value += 0.5 * dot(n - 1, adjoint, adjoint);
        solve(n, k, adjoint);
        for (long i = 0; i < n; i++) slope[i] -= k[i] * difference(n, adjoint, i) * difference(n, u, i);
    }
    return value;
}

void conductivity_product(long n, const double *x, const double *v, long rows, const double *data, double *result) {
    double k[n], kv[n], u[n], adjoint[n], du[n], dadjoint[n];
    for (long i = 0; i < n; i++) k[i] = exp(x[i]), kv[i] = k[i] * v[i], result[i] = 1e-4 * v[i];
    for (const double *source = data; source < data + rows * (n - 1); source += n - 1) {
        const double *measured = source + rows * (n - 1);
        memcpy(u, source, (n - 1) * sizeof(double));
        solve(n, k, u);
        for (long i = 0; i < n - 1; i++) adjoint[i] = u[i] - measured[i];
        solve(n, k, adjoint);
        transpose(n, kv, u, du);
        solve(n, k, du);
        transpose(n, kv, adjoint, dadjoint);
        for (long i = 0; i < n - 1; i++) dadjoint[i] += du[i];
        solve(n, k, dadjoint);
        for (long i = 0; i < n; i++)
            result[i] -= kv[i] * difference(n, adjoint, i) * difference(n, u, i) +
                         k[i] * difference(n, dadjoint, i) * difference(n, u, i) +
                         k[i] * difference(n, adjoint, i) * difference(n, du, i);
    }
}

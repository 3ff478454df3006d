/* Waves on a string, by leapfrog, and the adjoint: who made them, and how fast do they run?
 *
 *     u[n+1] = 2 u[n] - u[n-1] + speed2 * (second difference of u[n]) + strength * wavelet[n]  where the source is
 *
 * The ends are fixed, the string is at rest before. The loss is the sum of (u - traces)^2 at two receivers, over all
 * samples and steps. Gradients are overwritten; work has room for (steps + 1) * cells numbers.
 */
#include <stddef.h>
#include <string.h>

static double bend(const double *u, int cells, int i) {
    return (i + 1 < cells ? u[i + 1] : 0) - 2 * u[i] + (i > 0 ? u[i - 1] : 0);
}

static void forward(int cells, int steps, const double *speed2, const double *wavelet, int source, double strength,
                    double *u) {
    memset(u, 0, cells * sizeof(double));
    for (int n = 0; n < steps; n++) {
        const double *now = u + (size_t)n * cells;
        double *next = u + (size_t)(n + 1) * cells;
        for (int i = 0; i < cells; i++)
            next[i] = 2 * now[i] - (n ? now[i - cells] : 0) + speed2[i] * bend(now, cells, i);
        next[source] += strength * wavelet[n];
    }
}

/* gradient_speed2 and gradient_wavelet may be NULL: then only the loss is computed */
double misfit(int cells, int steps, int samples, const double *speed2, const double *wavelet,
              const double *sources, const double *traces, const int *receivers,
              double *gradient_speed2, double *gradient_wavelet, double *work) {
    double loss = 0;
    if (gradient_speed2) {
        memset(gradient_speed2, 0, cells * sizeof(double));
        memset(gradient_wavelet, 0, steps * sizeof(double));
    }
    for (int sample = 0; sample < samples; sample++) {
        const double *measured = traces + (size_t)sample * steps * 2;
        int source = (int)sources[2 * sample];
        double strength = sources[2 * sample + 1], a[256] = {0}, b[256] = {0}, c[256];
        double *later = a, *last = b, *here = c; /* derivatives by u[n+1], u[n+2] and u[n] */
        forward(cells, steps, speed2, wavelet, source, strength, work);
        for (int n = steps; n > 0; n--) {
            const double *now = work + (size_t)(n - 1) * cells, *next = now + cells;
            for (int i = 0; i < cells; i++) { /* of u[n], which u[n+1] and u[n+2] depend on */
                double bent = (i + 1 < cells ? speed2[i + 1] * later[i + 1] : 0) - 2 * speed2[i] * later[i] +
                              (i > 0 ? speed2[i - 1] * later[i - 1] : 0);
                here[i] = 2 * later[i] - last[i] + bent;
            }
            for (int r = 0; r < 2; r++) {
                double error = next[receivers[r]] - measured[2 * (n - 1) + r];
                loss += error * error;
                here[receivers[r]] += 2 * error;
            }
            if (gradient_speed2) {
                for (int i = 0; i < cells; i++)
                    gradient_speed2[i] += here[i] * bend(now, cells, i);
                gradient_wavelet[n - 1] += strength * here[source];
            }
            double *free = last;
            last = later;
            later = here;
            here = free;
        }
    }
    return loss;
}

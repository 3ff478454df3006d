! Heat in a rod, explicit steps: the temperatures at the end for a start and a conductivity, and the adjoint.
subroutine misfit(cells, samples, steps, conductivity, start, measured, loss, gradient) bind(c)
  use iso_c_binding, only: c_int, c_double
  implicit none
  integer(c_int), value :: cells, samples, steps
  real(c_double), intent(in) :: conductivity(cells + 1), start(cells, samples), measured(cells, samples)
  real(c_double), intent(out) :: loss, gradient(cells + 1)
  real(c_double) :: u(cells, 0:steps), v(cells), flux
  integer :: sample, step, i

  loss = 0
  gradient = 0
  do sample = 1, samples
    u(:, 0) = start(:, sample)
    do step = 1, steps
      u(:, step) = u(:, step - 1)
      do i = 1, cells - 1
        flux = conductivity(i + 1) * (u(i + 1, step - 1) - u(i, step - 1))
        u(i, step) = u(i, step) + flux
        u(i + 1, step) = u(i + 1, step) - flux
      end do
    end do
    v = u(:, steps) - measured(:, sample)
    loss = loss + sum(v**2)
    v = 2 * v
    do step = steps, 1, -1  ! the same backwards: v is the derivative by u(:, step)
      block
        real(c_double) :: w(cells)
        w = v
        do i = 1, cells - 1
          flux = w(i) - w(i + 1)
          gradient(i + 1) = gradient(i + 1) + flux * (u(i + 1, step - 1) - u(i, step - 1))
          v(i + 1) = v(i + 1) + flux * conductivity(i + 1)
          v(i) = v(i) - flux * conductivity(i + 1)
        end do
      end block
    end do
  end do
end subroutine

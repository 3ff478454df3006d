! Heat in a rod, explicit steps: the misfit of the temperatures at the end for a conductivity, and the adjoint.
subroutine misfit(cells, samples, steps, conductivity, start, measured, gradient, loss)
  implicit none
  integer, intent(in) :: cells, samples, steps
  double precision, intent(in) :: conductivity(cells + 1), start(cells, samples), measured(cells, samples)
  double precision, intent(inout) :: gradient(cells + 1)  ! overwritten; inout, so that f2py copies nothing
  double precision, intent(out) :: loss
  double precision :: u(cells, 0:steps), v(cells), w(cells), flux
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
      w = v
      do i = 1, cells - 1
        flux = w(i) - w(i + 1)
        gradient(i + 1) = gradient(i + 1) + flux * (u(i + 1, step - 1) - u(i, step - 1))
        v(i + 1) = v(i + 1) + flux * conductivity(i + 1)
        v(i) = v(i) - flux * conductivity(i + 1)
      end do
    end do
  end do
end subroutine

"""Save and replay steps whose losses or gradients were not finite, and record what ranks spend their time on."""

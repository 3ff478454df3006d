"""Parts of the documentation site's build, which ``docs/conf.py`` puts together."""

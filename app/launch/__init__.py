"""``tandem serve``: check the configuration, start Ray and HAProxy, deploy, wait, stop."""

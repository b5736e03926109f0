"""The distributed shell: placement, rollout manager, training actors. No mathematics lives here."""

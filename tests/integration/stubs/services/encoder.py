from services.stub import run_worker
from triptych.core.worker import Role

run_worker(Role.ENCODER)

"""Routes that other servers' clients call (load, ping, tokenizer_info, deletion of a model), and who may."""

import json
import shutil

import httpx
import pytest

from llmbox.app.config.model_settings import MemorySettings
from llmbox.app.config.settings import ServerSettings, Settings
from llmbox.app.models.catalog import BUILTIN_DIR
from llmbox.app.models.registry import Registry
from llmbox.app.security.keys import KeySpec
from support.cli_box import PATIENCE
from support.fake_engine import write_model
from support.openai_server import serving
from support.tokenizers_zoo import CHATML, byte_level, drawn_ids, write_text_files


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    tokenizer = byte_level()
    files = write_text_files(root / "one", tokenizer, CHATML)
    write_model(files, **drawn_ids(tokenizer), context=256, hold_at=5)
    adopted = root / "adopted"
    adopted.mkdir()
    shutil.copy(BUILTIN_DIR / "config.json", adopted)
    settings = Settings(server=ServerSettings(require_key=True), memory=MemorySettings(load_on_request=False))
    with serving(tmp_path_factory.mktemp("data"), controlled=True, settings=settings) as server:
        server.load(root / "one", "one")
        Registry(server.services.paths.registry_file).adopt_directory("mine", adopted)
        yield server


def client(server, *scopes: str, models: tuple[str, ...] = ()) -> httpx.Client:
    headers = {}
    if scopes:
        keys = server.services.security.keys
        name = "-".join(scopes) + "".join(models)
        _, secret = keys.add(KeySpec(name=name, scopes=scopes, models=models))
        headers["Authorization"] = f"Bearer {secret}"
    return httpx.Client(base_url=server.url, headers=headers, timeout=PATIENCE)


def test_liveness_needs_no_key_and_the_rest_does(place):
    with client(place) as nobody:
        assert nobody.get("/ping").json() == nobody.post("/ping").json() == {"status": "ok"}
        for method, path in (
            ("GET", "/load"),
            ("GET", "/tokenizer_info"),
            ("DELETE", "/v1/models/mine"),
            ("POST", "/rerank"),
            ("POST", "/v2/rerank"),
            ("POST", "/score"),
            ("POST", "/v1/score"),
            ("POST", "/classify"),
            ("POST", "/pooling"),
        ):
            answer = nobody.request(method, path, json=None if method != "POST" else {})
            assert answer.status_code == 401, path
            assert answer.json()["error"]["code"] == "invalid_api_key"


def test_the_load_is_what_is_open(place):
    with client(place, "infer") as infer:
        assert infer.get("/load").json() == {"server_load": 0}
        body = {"model": "one", "prompt": "x", "stream": True, "ignore_eos": True}
        with infer.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()  # kept: its end would end the stream
            next(lines)
            assert httpx.get(f"{place.url}/load", headers=infer.headers).json() == {"server_load": 1}


def test_what_a_tokenizer_is(place):
    with client(place, "infer", models=("one",)) as infer:
        told = infer.get("/tokenizer_info", params={"model": "one"}).json()
        config = json.loads((place.services.engines.find("one").path / "tokenizer_config.json").read_text())
        assert told == {"tokenizer_class": "PreTrainedTokenizerFast", **config, "chat_template": CHATML}
        assert infer.get("/tokenizer_info").json() == told
        refused = infer.get("/tokenizer_info", params={"model": "two"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "model_not_allowed")


def test_deleting_a_model_is_the_owners(place):
    with client(place, "read", "infer") as infer:
        refused = infer.delete("/v1/models/mine")
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "insufficient_scope")
    with client(place, "admin") as admin:
        assert "mine" in Registry(place.services.paths.registry_file).read().directories
        assert admin.delete("/v1/models/mine").json() == {"id": "mine", "object": "model", "deleted": True}
        assert Registry(place.services.paths.registry_file).read().directories == {}
        gone = admin.delete("/v1/models/org/absent")
        assert (gone.status_code, gone.json()["error"]["code"]) == (404, "model_not_found")
        assert admin.delete("/v1/models/builtin").status_code == 403
        assert admin.delete("/v1/models/one").status_code == 404  # a folder that was not adopted

from acme_model_class_overrides import AcmeLlama

from hardpoint.testing import check_model, engine_here

OVERRIDES = {"LlamaForCausalLM": "acme_model_class_overrides:AcmeLlama"}


def test_it_keeps_the_contract():
    check_model(AcmeLlama)


def test_it_takes_the_place_of_the_registered_class(isolated_registries):
    with engine_here(model_class_overrides=OVERRIDES) as llm:
        assert llm.apply_model(lambda model: type(model).__name__) == ["AcmeLlama"]

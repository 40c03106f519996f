"""Entry of the campaign; `campaign.py` says what it does."""

from tests.campaigns.harness import run_campaign

if __name__ == "__main__":
    raise SystemExit(run_campaign(__spec__.parent))
